{{/* (dict "root" $ "role" "decode" "values" .Values.decode): the ports of a rank, by name. */}}
{{- define "whalepod.rankPorts" -}}
- name: grpc
  containerPort: {{ .values.port }}
- name: metrics
  containerPort: {{ add .values.port 1000 }}
{{- if include "whalepod.servesDirect" . }}
- name: direct
  containerPort: {{ add .values.port 2000 }}
{{- end }}
{{- end -}}

{{/* A pool as a StatefulSet: a pod's ordinal is its rank's index, and so its name in the registry. */}}
{{- define "whalepod.rankStatefulSet" -}}
{{- $root := .root -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "whalepod.labels" . | nindent 4 }}
spec:
  serviceName: {{ include "whalepod.fullname" .root }}-{{ .role }}
  podManagementPolicy: Parallel
  {{- if not .values.autoscaling.enabled }}
  replicas: {{ .values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "whalepod.selectorLabels" . | nindent 6 }}
  template:
    metadata:
      {{- include "whalepod.podMetadata" . | nindent 6 }}
    spec:
      {{- include "whalepod.podBase" . | nindent 6 }}
      # A rank that is stopped leaves placement first, and lets its requests finish or moves them.
      terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 15 }}
      {{- with include "whalepod.kernels" . }}
      {{- . | nindent 6 }}
      {{- end }}
      containers:
        - name: {{ .role }}
          {{- include "whalepod.containerBase" . | nindent 10 }}
          command: [whalepod, {{ .role }}]
          args:
            - --config=/etc/whalepod/cluster.yaml
            {{- with .values.extraArgs }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          env:
            - name: WHALEPOD_INDEX
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
            {{- include "whalepod.env" . | trim | nindent 12 }}
            - name: WHALEPOD_ADVERTISE_HOST
              value: $(POD_IP)
          ports:
            {{- include "whalepod.rankPorts" . | nindent 12 }}
          {{- include "whalepod.grpcProbes" (dict "root" .root "port" .values.port "startupSeconds" .values.startupSeconds "other" (dict "httpGet" (dict "path" "/metrics" "port" "metrics"))) | nindent 10 }}
          resources:
            {{- include "whalepod.resources" .values | nindent 12 }}
          volumeMounts:
            {{- include "whalepod.volumeMounts" . | nindent 12 }}
      volumes:
        {{- include "whalepod.volumes" . | nindent 8 }}
{{- end -}}

{{/* Names of a pool's pods, there before the pods are ready: ranks that share experts meet before they serve. */}}
{{- define "whalepod.rankService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "whalepod.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "whalepod.selectorLabels" . | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .values.port }}
      targetPort: grpc
    - name: metrics
      port: {{ add .values.port 1000 }}
      targetPort: metrics
{{- end -}}

{{- define "whalepod.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "whalepod.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "whalepod.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* (dict "root" $ "role" … "values" … "kind" "StatefulSet" "metric" "whalepod_rank_running") */}}
{{- define "whalepod.horizontalPodAutoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "whalepod.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ .kind }}
    name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  minReplicas: {{ .values.autoscaling.minReplicas }}
  maxReplicas: {{ .values.autoscaling.maxReplicas }}
  metrics:
    - type: Pods
      pods:
        metric:
          name: {{ .metric }}
        target:
          type: AverageValue
          averageValue: {{ .values.autoscaling.target | quote }}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: 300
      policies:
        - type: Pods
          value: 1
          periodSeconds: {{ add .root.Values.drainSeconds 30 }}
{{- end -}}

{{/* (dict … "query" "sum(…)") */}}
{{- define "whalepod.scaledObject" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "whalepod.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ .kind }}
    name: {{ include "whalepod.fullname" .root }}-{{ .role }}
  minReplicaCount: {{ .values.autoscaling.minReplicas }}
  maxReplicaCount: {{ .values.autoscaling.maxReplicas }}
  cooldownPeriod: 300
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ .root.Values.autoscaling.prometheusUrl }}
        query: {{ .query | quote }}
        threshold: {{ .values.autoscaling.target | quote }}
{{- end -}}

{{/* What a query of KEDA sums over. */}}
{{- define "whalepod.podMatcher" -}}
{{- printf "{namespace=%q,pod=~%q}" .root.Release.Namespace (printf "%s-%s-.*" (include "whalepod.fullname" .root) .role) -}}
{{- end -}}
